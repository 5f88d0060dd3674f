"""Agents: programs written against the `openai` client, whose calls of a model the policy answers.

agent ── POST /v1/chat/completions ──> endpoint ── Exchange ──> episode ── Observation ──> the policy
  ^                                                                                          │
  └───────────────── chat completion <── answer <──────────────── step <─────────────────────┘
"""
