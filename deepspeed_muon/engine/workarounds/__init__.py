"""Workarounds for defects of DeepSpeed that every optimizer has: a module for each family, a constant for each defect.

A :class:`~deepspeed_muon.engine.patching.Workaround` has the first and the last release that need it. It is off in the
releases after the last one, once somebody has seen that they are right. ``tests/unit/test_workarounds.py`` says which
ones the newest tested release needs; ``scripts/planted_defects.py --workarounds`` switches each of them off and runs
the test that then has to fail.
"""
