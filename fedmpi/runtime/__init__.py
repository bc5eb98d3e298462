"""The round: server, client, schedule, placement."""
