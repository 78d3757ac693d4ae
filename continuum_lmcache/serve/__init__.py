"""The only files that import ray: replicas of vLLM's server behind Ray Serve's proxy, one state for all.

    proxy       names.py: whose turn a request is, from its body and headers, into one header
    proxy       router.py: asks the state where the turn goes; a hash ring where nobody answers
    an actor    state.py: owns the Fleet (continuum_lmcache.fleet), which decides
    a replica   replica.py: vLLM's engine and vLLM's own app; tells the state what happens, each half second
    a node      substrate.py: one LMCache MP server below all of its replicas
    app.py      build(args): the application for `serve run` and for a Serve config file

Seams, read and run on Ray 2.60.0 (docs/ray.md has them): all alpha, so the extra `fleet` is bound to 2.60.
"""
