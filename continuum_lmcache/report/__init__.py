"""The HTML page about recorded runs. Needs plotly."""
