"""What the requests of the check scripts talk about."""

# Enough for requests that differ from their first token on.
TOPICS = ["the sea", "bread", "winter", "the moon", "bicycles", "rivers", "tea", "mountains", "music", "trains"]
MORE_TOPICS = [
    *TOPICS, "gardens", "chess", "honey bees", "lighthouses", "paper", "glass", "salt", "rain", "clocks", "maps",
]
# Repeated where a prompt must be long.
SENTENCE = "A shoal has no leader and each fish watches a few of its neighbours, so the whole of it turns as one. "
