"""vLLM on a CPU with kvferry: 16 prompts, twice, through a device cache that holds a quarter of them.

The model beside this file has random weights, so that nothing is downloaded. docs/vllm.md says how to run this.
"""

from pathlib import Path

from vllm import LLM, SamplingParams

TRANSFER = {
    "kv_connector": "KVFerryConnector",
    "kv_role": "kv_both",
    # This model computes faster than its blocks are copied, which kvferry measures by default.
    "kv_connector_extra_config": {"pool_bytes": "256MiB", "load_decision": "always"},
}

if __name__ == "__main__":
    llm = LLM(
        str(Path(__file__).parent),
        load_format="dummy",
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        block_size=32,
        num_gpu_blocks_override=80,
        kv_transfer_config=TRANSFER,
    )
    prompts = [{"prompt_token_ids": [8 * i + j % 7 for j in range(600)]} for i in range(16)]
    few = SamplingParams(max_tokens=8, ignore_eos=True, detokenize=False)
    for turn in (1, 2):
        outputs = llm.generate(prompts, few, use_tqdm=False)
        print(f"turn {turn}: {sum(output.num_cached_tokens for output in outputs)} of {16 * 600} prompt tokens cached")
    input("Look at it with try/bin/kvferry stats, or at the address of the admin API in the log; Enter ends it. ")
