"""A trained model in a folder or on the hub, with a card that says what it is worth."""
