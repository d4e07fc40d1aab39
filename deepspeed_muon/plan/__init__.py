"""Pure data, in the order in which to read it. docs/architecture.md follows an example through all four.

* :mod:`.placement`: which rank holds which elements of a parameter, as a rule of a few numbers;
* :mod:`.layout`: a matrix with its shape, its blocks and its placement;
* :mod:`.owners`: which rank orthogonalises which matrix;
* :mod:`.chunks`: what is sent together, and where in the fragment and owner buffers each fragment is.
"""
