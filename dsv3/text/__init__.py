"""Text of a model: tokenizer, chat template, detokenizer (`output`), stop strings, tool-call parser, grammars."""
