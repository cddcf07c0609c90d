"""This paper's bookkeeping: what it says, its numbers, and the studies behind its figures."""
