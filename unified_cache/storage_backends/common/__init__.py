"""Parts that stores of any kind share."""
