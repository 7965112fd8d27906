"""SGLang's own trees, controllers, host pools and storage threads on a CPU, over the adapter.

    install    the engine beside the repository: its wheel unpacked, and an environment with what it imports
    absent     packages that it imports and that need a GPU, as empty names
    cpu        streams, and the copies between device and host that are kernels elsewhere
    stacks     device pools of five kinds of models, and a tree over them
    session    prompts computed, stored, forgotten, read and compared byte by byte; linked_session: over a linker
    outcome    descriptions of runs, and of what came of them
    running    a run: engines over some stores
    job        runs in processes of their own, described by JSON
    runner     runs over stores in one directory, and what has to hold of what they tell
    spoken     commands as the engine understands them
    record     calls of the engine on its storage, kept for tests without it

Nothing here is collected by `make test`: `make e2e-sglang` runs it; `ARGS="-k linked --stores file"` some of it.
"""
