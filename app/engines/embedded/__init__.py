"""Built-in engine: a transformers causal LM over paged KV, small to read and complete enough to serve.

The way of a request, file by file:

    api        reads a call under `/v1` (`protocol` has its fields) and tokenizes its prompts
    engine     makes a `Request` of each prompt (`request`), and posts it to the engine thread's inbox
    loop       runs the steps: schedule, start transfers, run the model, send tokens to the client
    scheduler  chooses tokens and device blocks (`block_pool`) for each step, and calls kvferry's hooks
    runner     runs the model (`model`) over paged KV (`attention`), and samples tokens
    tokenizer  turns tokens into text, up to a stop string
"""
