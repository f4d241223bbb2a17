"""The tests of mlxd. A folder per part; fakes and plugins that they share stand beside them."""
