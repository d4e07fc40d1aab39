"""One step of the optimizer. The loop over the chunks is :meth:`.runner.StepRunner.run`; everything else serves it.

=========================  ===========================================================================================
before the first step      :mod:`.step_set` (what one call of ``step()`` updates), :mod:`.bound` (the runners of all
                           step sets), :mod:`.loading` (checks a state dict)
once for all step sets     :mod:`.gradient_flags` (which gradients are zero or not finite on some rank)
in every step              :mod:`.tensors` (rates, momentum, weights), :mod:`.adamw` (all other parameters)
in every chunk             :mod:`.tables` (where its elements are), :mod:`.orthogonalize` (Newton-Schulz in batches),
                           :mod:`.check` (of every result)
only with some settings    :mod:`.tensor_parallel`, :mod:`.row_state` (of a variant), :mod:`.int8` (``momentum_dtype``)
=========================  ===========================================================================================

Who holds whom: an engine's :class:`.Muon` has one :class:`.BoundSteps`, which has a :class:`.StepRunner` and
:class:`.SetFlags` for each :class:`.StepSet`. A runner has the :class:`.StepContext` (settings, kernels,
counters), the exchange plan, a :class:`.ChunkTable` for each chunk, the :class:`.ResultCheck`, and for the length of
one step a :class:`.StepTensors`.
"""
