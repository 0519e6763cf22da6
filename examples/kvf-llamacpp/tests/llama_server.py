"""A llama.cpp server process with a tiny random model, for the tests of slots: `python llama_server.py GGUF FOLDER`
writes its address to stdout and serves until its standard input ends."""

import sys
from pathlib import Path

VOCABULARY, LAYERS, HIDDEN, HEADS, KV_HEADS, FEED = 260, 2, 128, 4, 2, 256


def write_model(file: Path) -> None:
    """A Llama whose greedy tokens depend on all of the prompt."""
    import gguf
    import numpy as np

    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(str(file), "llama")
    writer.add_context_length(2048)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(FEED)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(VOCABULARY)
    special = [b"<unk>", b"<s>", b"</s>"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*special, *(f"<0x{byte:02X}>".encode() for byte in range(256)), "\u2581".encode()])
    writer.add_token_scores([0.0] * VOCABULARY)
    writer.add_token_types([2, 3, 3, *[6] * 256, 1])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)

    def tensor(name: str, rows: int, columns: int, scale: float = 1.8) -> None:
        writer.add_tensor(name, (random.standard_normal((rows, columns)) * scale / columns**0.5).astype(np.float32))

    def ones(name: str) -> None:
        writer.add_tensor(name, np.ones(HIDDEN, np.float32))

    tensor("token_embd.weight", VOCABULARY, HIDDEN, HIDDEN**0.5)
    tensor("output.weight", VOCABULARY, HIDDEN)
    ones("output_norm.weight")
    for layer in range(LAYERS):
        block = f"blk.{layer}."
        ones(block + "attn_norm.weight")
        ones(block + "ffn_norm.weight")
        tensor(block + "attn_q.weight", HIDDEN, HIDDEN)
        tensor(block + "attn_k.weight", KV_HEADS * HIDDEN // HEADS, HIDDEN)
        tensor(block + "attn_v.weight", KV_HEADS * HIDDEN // HEADS, HIDDEN)
        tensor(block + "attn_output.weight", HIDDEN, HIDDEN)
        tensor(block + "ffn_gate.weight", FEED, HIDDEN)
        tensor(block + "ffn_up.weight", FEED, HIDDEN)
        tensor(block + "ffn_down.weight", HIDDEN, FEED)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    import xllamacpp

    parameters = xllamacpp.CommonParams()
    parameters.model.path = sys.argv[1]
    parameters.slot_save_path = f"{sys.argv[2]}/"
    parameters.endpoint_slots = True
    parameters.n_parallel, parameters.warmup = int(sys.argv[3]), False
    parameters.n_ctx = 2048 * parameters.n_parallel
    parameters.cpuparams.n_threads = 2
    # Or its own memory would serve what the test wants from kvframework.
    parameters.cache_ram_mib = 0
    parameters.n_cache_reuse = 16
    if sys.argv[4] == "transposed":
        parameters.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(parameters)
    print(server.listening_address, flush=True)
    sys.stdin.read()
