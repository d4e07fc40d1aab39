"""What is decided before the first step, in the order in which to read it; nothing is sent.

* :mod:`.placement`: which rank holds which elements of a parameter, as a rule of a few numbers;
* :mod:`.layout`: a matrix with its shape, its blocks and its placement;
* :mod:`.owners`: which rank orthogonalises which matrix;
* :mod:`.chunks`: what is sent together, and where in the fragment and owner buffers each fragment is;
* :mod:`.flat_order`: before ZeRO 1 and 2 flatten the parameters, the order that gives all ranks equal work.

docs/architecture.md follows an example through the first four.
"""
