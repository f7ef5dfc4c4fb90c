"""The model: parameters, the served steps (prefill and decode), and the forward pass of training."""

from dsv3.config.model import PAGE_SIZE
from dsv3.model.batch import AttentionForm, DecodeBatch, PrefillBatch
from dsv3.model.decoder import logits
from dsv3.model.forward import ForwardOutput, forward
from dsv3.model.params import Fp4Weight, Fp8Weight, Int4Weight, Params, abstract, declare, initialize
from dsv3.model.steps import StepOutput, decode, prefill

__all__ = [
    "PAGE_SIZE",
    "AttentionForm",
    "DecodeBatch",
    "ForwardOutput",
    "Fp4Weight",
    "Fp8Weight",
    "Int4Weight",
    "Params",
    "PrefillBatch",
    "StepOutput",
    "abstract",
    "declare",
    "decode",
    "forward",
    "initialize",
    "logits",
    "prefill",
]
