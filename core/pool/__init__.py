"""The pool: which slot holds which key, which slots are pinned or free, and which one is evicted next."""
