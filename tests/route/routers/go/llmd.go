// The decoder of llm-d on standard input: lines of a topic and a hexadecimal payload in, lines of JSON out.
package main

import (
	"bufio"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"strings"

	"github.com/llm-d/llm-d-router/pkg/kvevents"
	"github.com/llm-d/llm-d-router/pkg/kvevents/engineadapter"
)

func main() {
	adapter := engineadapter.NewVLLMAdapter()
	lines := bufio.NewScanner(os.Stdin)
	lines.Buffer(nil, 1<<28)
	for lines.Scan() {
		topic, text, _ := strings.Cut(lines.Text(), " ")
		payload, err := hex.DecodeString(text)
		if err != nil {
			panic(err)
		}
		pod, model, batch, err := adapter.ParseMessage(&kvevents.RawMessage{Topic: topic, Payload: payload})
		if err != nil {
			fmt.Println(`{"error":` + fmt.Sprintf("%q", err.Error()) + "}")
			continue
		}
		out, _ := json.Marshal(map[string]any{"Pod": pod, "Model": model, "Events": batch.Events})
		fmt.Println(string(out))
	}
}
