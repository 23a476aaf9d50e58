"""TaskD's inner names, as far as the guides and other packages use them."""
