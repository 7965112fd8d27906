"""vLLM on the CPU with its KV in our stores, compared with vLLM alone: ``make e2e-vllm``.

installation     the engine in a virtual environment outside the repository
models           tiny checkpoints with random weights
cpu              the copy worker that vLLM lacks on machines without a GPU
deepseek_v4      DeepSeek-V4 on a CPU without AMX
drawn_weights    its weights, which no checkpoint holds
engine_process   the process an engine runs in, told what to do line by line
engine           such a process, as the checks see it
check_*          the checks, collected by name
"""
