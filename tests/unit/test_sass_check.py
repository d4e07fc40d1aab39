"""scripts/sass_check.py on listings as cuobjdump writes them: narrow stores are found, however a loop is unrolled."""

from __future__ import annotations

from itertools import product

from tests.support.scripts import load_script

faults_in = load_script("sass_check").faults_in

# Kernel and its arrays (0: fp32), and 16-byte loads and stores of eight elements, by hand.
KERNELS = [
    *(
        ("momentum_pack_kernel", (m, g, out), 2 - (m > 0) + 2 - (g > 0), 2 - (m > 0) + 2 - (out > 0))
        for m, g, out in product(range(3), repeat=3)
    ),
    *(
        ("momentum_pack_int8_kernel", (grad, out), 2 - (grad > 0), 2 - (out > 0))
        for grad, out in product(range(3), repeat=2)
    ),
    *(
        ("unpack_apply_kernel", (param, update), 2 - (param > 0) + 2 - (update > 0), 2 - (param > 0))
        for param, update in product(range(3), repeat=2)
    ),
]


def listing(rounds: int = 1, split: int = 0, leave_out: int = 0) -> str:
    """Return a listing of all kernels, with ``split`` stores of each made of four and some kernels left out."""
    lines = []
    for kernel, dtypes, loads, stores in KERNELS[leave_out:]:
        arguments = "".join(f"Li{each}E" for each in dtypes)
        name = f"_ZN4muon47_GLOBAL__N__79de{len(kernel)}{kernel}I{arguments}EEvNS0_9FragmentsINS0_12PackFragmentEEE"
        lines.append(f"\t\tFunction : {name}")
        lines += ["        /*0190*/      LDG.E.128.CONSTANT R12, desc[UR4][R16.64] ;"] * (loads * rounds)
        lines += ["        /*03b0*/      STG.E.128 desc[UR4][R16.64+0x10], R12 ;"] * (stores * rounds - split)
        lines += ["        /*0570*/ @P0  STG.E desc[UR4][R2.64+-0x8], R4 ;"] * (4 * split + 2)
        if "int8" in kernel:
            lines += ["        /*0210*/      LDG.E.64 R4, desc[UR4][R8.64] ;"] * rounds
            lines += ["        /*0b50*/      STG.E.64 desc[UR4][R8.64], R10 ;"] * rounds
        lines += ["        /*0b60*/      LDG.E.U16.CONSTANT R6, desc[UR4][R6.64] ;"]
    return "\n".join(lines)


def test_16_byte_accesses_pass() -> None:
    assert list(faults_in(listing())) == []
    assert list(faults_in(listing(rounds=4))) == []


def test_a_store_that_was_split_is_found() -> None:
    for rounds in (1, 4):
        found = list(faults_in(listing(rounds, split=1)))
        assert len(found) == len(KERNELS)
        assert found[1].startswith(
            f"momentum_pack_kernel<fp32, fp32, fp16>: {4 * rounds} loads and {3 * rounds - 1} stores"
        )


def test_a_kernel_that_is_not_there_is_found() -> None:
    assert list(faults_in(listing(leave_out=1))) == [
        "momentum_pack_kernel<fp32, fp32, fp32> is not in the listing"
    ]
