"""Messages to bytes and back: frames, typed messages, sparse supports, bit packing. No pickle, ever."""
