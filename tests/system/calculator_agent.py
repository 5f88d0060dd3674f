"""An agent that multiplies for the policy where the policy asks it to, and prints whether its answer is right."""

import json
import os
import re
import sys
import urllib.request

row = json.loads(sys.stdin.read())
messages = [{"role": "user", "content": row["prompt"]}]
headers = {"Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
said = ""
for _ in range(2):
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
    with urllib.request.urlopen(request) as answer:
        said = json.loads(answer.read())["choices"][0]["message"]["content"]
    asked = re.fullmatch(r"=(\d{1,3})\*(\d{1,3})", said)
    if asked is None:
        break
    product = str(int(asked[1]) * int(asked[2])) + ":"
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": product}]
sys.stdout.write(f"{float(said == row['answer'])}\n")
