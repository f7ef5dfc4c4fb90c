"""Counting the host's launches in a step, from XLA's dump of thunks."""

from benchmarks.gpu.thunks import layer_loop, parse, table

TEXT = """000: kCommandBuffer [source       | next=013 (1)]
    001: kCopy         [source       | next=002 (1)] kCopy
013: kWhile         [prev=000 (1) | next=019 (1)]
condition:
    014: kCustomKernel [source | sink] loop_compare_fusion
  body:
    015: kCustomKernel [source | sink] loop_add_fusion
030: kWhile         [prev=029 (1) | next=137 (1)]
condition:
    031: kCustomKernel [source | sink] loop_compare_fusion_2
  body:
    000: kCommandBuffer [source       | next=086 (1)]
        032: kCustomCall   [source        | next=033 (1) ] kCustomCall
        033: kCustomKernel [prev=032 (1)  | next=034 (1) ] fusion
    086: kAsyncStart    [prev=000 (1) | next=000 (2)] stream=communication_stream[0], async_id=86
        087: kAllToAll [source | sink] kAllToAll
    088: kAsyncDone     [source       | sink        ] async_id=86
137: kCustomKernel  [prev=030 (1) | sink        ] input_reduce_fusion_3
"""


def test_a_layer_is_the_loop_with_collectives_and_its_condition_is_not_launched() -> None:
    program = parse(TEXT)
    assert [thunk.kind for thunk in program.inner] == ["CommandBuffer", "While", "While", "CustomKernel"]
    launched = [(thunk.kind, captured) for thunk, captured in layer_loop(program).launched()]
    assert launched == [
        ("CommandBuffer", False),
        ("CustomCall", True),
        ("CustomKernel", True),
        ("AsyncStart", False),
        ("AllToAll", False),
        ("AsyncDone", False),
    ]
    assert list(table(program))[-1].endswith("command buffer: no.")


def test_a_step_that_is_captured_whole_is_one_launch() -> None:
    whole = "000: kCommandBuffer [source | sink]\n" + "".join("    " + line + "\n" for line in TEXT.splitlines())
    program = parse(whole)
    assert [thunk.kind for thunk in program.inner] == ["CommandBuffer"]
    assert list(table(program))[-1].endswith("command buffer: yes.")
