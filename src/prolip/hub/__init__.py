"""A trained model in a folder or on the hub, with a card of its metrics and limits."""
