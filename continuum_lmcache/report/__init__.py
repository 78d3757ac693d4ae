"""The HTML page on recorded runs. Needs plotly."""
