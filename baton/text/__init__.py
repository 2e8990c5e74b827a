"""Between text and token ids: tokenizers, chat templates, incremental detokenization, stop strings. No torch, no I/O
but reading a model's directory."""
