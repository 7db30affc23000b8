"""Meter a model's own generate() from Python: `python examples/meter_generate.py MODEL [QUANTIZER]`."""

import sys

from transformers import AutoModelForCausalLM, AutoTokenizer

import witcert_core as wc

PROMPTS = ["The capital of France is", "Two plus two is", "Once upon a time there was"]


def main(name: str, quantizer: str = "int8_dither") -> None:
    """Three prompts in one padded batch, sampled from a quantized cache."""
    tokenizer = AutoTokenizer.from_pretrained(name, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(name)
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)
    with wc.meter(model, quantizer=quantizer) as m:
        answers = model.generate(**inputs, max_new_tokens=16, do_sample=True, pad_token_id=tokenizer.pad_token_id)
    for number, text in enumerate(tokenizer.batch_decode(answers, skip_special_tokens=True)):
        print(text)
        print(m.render(number))


if __name__ == "__main__":
    main(*sys.argv[1:])
