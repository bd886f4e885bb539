"""A whole model in Transformers, with packed experts, in a conversation that a template renders."""

import polymoe

model, tokenizer = polymoe.load("models/sums-gpt-oss-mxfp4", device="cpu")  # or "openai/gpt-oss-20b", device="cuda"

messages = []
for question in ("123+456=", "500-499=", "77-88="):
    messages.append({"role": "user", "content": question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**prompt.to(model.device), max_new_tokens=16)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    messages.append({"role": "assistant", "content": answer})
    print(f"{question} {answer}")
