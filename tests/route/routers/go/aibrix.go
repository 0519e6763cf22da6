// The decoder of AIBrix on standard input: lines of hexadecimal payloads in, lines of JSON out.
package main

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"

	"aibrix/kvcache"
)

func main() {
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		payload, err := hex.DecodeString(lines.Text())
		if err != nil {
			panic(err)
		}
		batch, err := kvcache.DecodeEventBatch(payload, "model", "pod")
		if err != nil {
			fmt.Println(`{"error":` + fmt.Sprintf("%q", err.Error()) + "}")
			continue
		}
		out, _ := json.Marshal(batch)
		fmt.Println(string(out))
	}
}
