"""The only files of the package that import vllm. `register` is what vLLM's plugin loader calls."""


def register() -> None:
    """Teach this process's vLLM the word `continuum`. Safe to call more than once.

    All else is installed where the policy is chosen (hooks/engine_args.py: adopt) or its scheduler is built:
    an engine with another policy is vLLM's own.
    """
    from continuum_lmcache.vllm_plugin.hooks import engine_args

    engine_args.install()
