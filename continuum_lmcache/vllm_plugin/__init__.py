"""The only files of the package that import vllm. `register` is what vLLM's plugin loader calls."""


def register() -> None:
    """Teach this process's vLLM the word `continuum`. Safe to call more than once."""
    from continuum_lmcache.vllm_plugin import cli, wakeup

    cli.install()
    wakeup.install()
