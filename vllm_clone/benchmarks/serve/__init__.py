"""`vllm bench serve`: requests from a data set against a running server, and the figures they give.

``options`` checks the flags, ``datasets`` makes the samples, ``arrivals`` times them, ``backends`` words them for a
protocol, ``http`` and ``client`` send them, ``metrics`` turns what came back into figures, ``report`` prints and
saves those; ``run`` does all of it in order.
"""
