"""The Atari core's oracle (ale-py), its scalar reference, and the tests that compare them."""
