"""The sweep's parts: cases, grids by figure, rows, the runner, tables and figures."""
