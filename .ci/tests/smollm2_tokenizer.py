"""SmolLM2's tokenizer out of the GGUF file that a wheel on PyPI carries: arguments FOLDER_OF_GGUF, OUT."""

import sys

import transformers

tokenizer = transformers.AutoTokenizer.from_pretrained(
    sys.argv[1], gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf"
)
tokenizer.save_pretrained(sys.argv[2])
