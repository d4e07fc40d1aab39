"""The exchange of the chunks of a Muon step, and the checks by which ranks agree before anything is sent.

* :mod:`.all_to_all`: gather and scatter of a chunk, and their buffers;
* :mod:`.ranks`: the ranks of an engine, small collectives with time-outs, the barrier at start, and the wait at exit;
* :mod:`.agreement`: all ranks raise if one fails or if their settings differ.
"""
