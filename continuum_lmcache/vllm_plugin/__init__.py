"""The only files of the package that import vllm. vLLM's plugin loader calls `register`."""


def register() -> None:
    """Add the policy `continuum` to this process's vLLM. Safe to call more than once.

    The rest is installed where the policy is chosen (hooks/engine_args.py: adopt) or its scheduler is built:
    an engine with another policy is vLLM's own.
    """
    from continuum_lmcache.vllm_plugin.hooks import engine_args

    engine_args.install()
