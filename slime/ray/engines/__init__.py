"""The inference engines of a run: their actors, slots, servers, health and memory."""
