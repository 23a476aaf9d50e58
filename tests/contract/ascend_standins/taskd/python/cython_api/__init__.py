"""Where the real one loads libtaskd.so."""
