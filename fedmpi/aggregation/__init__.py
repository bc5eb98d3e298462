"""How a sum of vectors reaches the server. Knows neither what is trained nor how bytes travel."""
