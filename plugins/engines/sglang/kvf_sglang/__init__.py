"""SGLang as an engine, through its own HiCache storage interface. SGLang selects `kvf_sglang.storage`; only it, `facts`
and `weight_updates` import SGLang, so that everything else here is tested without it."""
