#!/usr/bin/env python3
"""Ask for answers of a given form: a choice, a pattern, and JSON by a schema.

structured_outputs.py MODEL    (a Hugging Face directory, a .gguf file, or a hub id)
"""

import argparse
import json

from vllm_clone import LLM, SamplingParams, StructuredOutputsParams

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 30},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
    },
    "required": ["name", "age"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    args = parser.parse_args()

    llm = LLM(model=args.model, max_model_len=2048)
    questions = {
        "Is 'A wonderful film.' positive or negative?": StructuredOutputsParams(choice=["positive", "negative"]),
        "When did the first human land on the moon?": StructuredOutputsParams(regex=r"[0-9]{4}-[0-9]{2}-[0-9]{2}"),
        "Describe a person as JSON.": StructuredOutputsParams(json=PERSON, disable_any_whitespace=True),
    }
    answers = []
    for question, form in questions.items():
        params = SamplingParams(temperature=0, max_tokens=100, structured_outputs=form)
        (output,) = llm.chat([{"role": "user", "content": question}], params, use_tqdm=False)
        answers.append(output.outputs[0].text)
        print(f"{question} → {answers[-1]}")
    person = json.loads(answers[-1])
    print(f"{person['name']} is {person['age']} years old")


if __name__ == "__main__":
    main()
