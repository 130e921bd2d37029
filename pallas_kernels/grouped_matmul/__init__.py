"""Products of sorted rows with the weights of their groups: the experts of a mixture-of-experts layer."""
