"""SGLang as an engine, through its own HiCache storage interface. SGLang selects `kvf_sglang.storage`; only it, `facts`
and `cache` import SGLang, so that everything else here is tested without it."""
