"""Chat templates of the model families, each in the form that its models were trained on.

Only the wording of instructions about tools is shortened; what stands around turns is as in the family.
"""

from __future__ import annotations

# Llama 3.1: dates in a system turn that is always there, tools in the first user turn, results as JSON.
LLAMA_3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}
{%- set turns = messages[1:] %}{%- else %}{%- set system = '' %}{%- set turns = messages %}{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- if tools %}{{- 'Environment: ipython\\n' }}{%- endif %}
{{- 'Cutting Knowledge Date: December 2023\\nToday Date: 26 Jul 2024\\n\\n' + system + '<|eot_id|>' }}
{%- for message in turns %}
{%- if message.role == 'tool' %}
{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + message.content | tojson + '<|eot_id|>' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0].function %}
{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n{"name": "' + call.name + '", "parameters": ' }}
{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- else %}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if tools and loop.first %}{{- 'Functions: ' + tools | tojson + '\\n\\n' }}{%- endif %}
{{- message.content | trim + '<|eot_id|>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""

_QWEN_OPENING = """\
{%- if tools %}
{{- '<|im_start|>system\\n' + (messages[0].content if messages[0].role == 'system' else default) }}
{{- '\\n\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- elif default %}{{- '<|im_start|>system\\n' + default + '<|im_end|>\\n' }}
{%- endif %}"""
_QWEN_CALLS = """\
{%- for call in message.tool_calls %}
{{- '\\n' if message.content or not loop.first else '' }}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}
{%- endfor %}"""
_QWEN_TOOL = """\
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}"""

# Qwen 2.5: a default system text, calls between tags, results as user turns.
QWEN_2 = f"""\
{{%- set default = 'You are Qwen, created by Alibaba Cloud. You are a helpful assistant.' %}}
{_QWEN_OPENING}
{{%- for message in messages %}}
{{%- if message.role == 'tool' %}}
{_QWEN_TOOL}
{{%- elif message.role == 'assistant' %}}
{{{{- '<|im_start|>assistant\\n' + message.content }}}}
{_QWEN_CALLS}
{{{{- '<|im_end|>\\n' }}}}
{{%- elif not (loop.first and message.role == 'system') %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endif %}}{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}{{%- endif %}}"""

# Qwen 3: thoughts shown from the last question on, dropped before it; none at all on request.
QWEN_3 = f"""\
{{%- set default = '' %}}
{_QWEN_OPENING}
{{%- set ns = namespace(last=0) %}}
{{%- for message in messages %}}
{{%- if message.role == 'user' %}}{{%- set ns.last = loop.index0 %}}{{%- endif %}}{{%- endfor %}}
{{%- for message in messages %}}
{{%- if message.role == 'tool' %}}
{_QWEN_TOOL}
{{%- elif message.role == 'assistant' %}}
{{%- set content = message.content %}}{{%- set thought = message.reasoning_content or '' %}}
{{%- if '</think>' in content %}}
{{%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\\n') %}}
{{%- set content = content.split('</think>')[-1].lstrip('\\n') %}}{{%- endif %}}
{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if loop.index0 > ns.last and (loop.last or thought) %}}
{{{{- '<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content.lstrip('\\n') }}}}
{{%- else %}}{{{{- content }}}}{{%- endif %}}
{_QWEN_CALLS}
{{{{- '<|im_end|>\\n' }}}}
{{%- elif not (loop.first and message.role == 'system') %}}
{{{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}}}
{{%- endif %}}{{%- endfor %}}
{{%- if add_generation_prompt %}}{{{{- '<|im_start|>assistant\\n' }}}}
{{%- if enable_thinking is defined and enable_thinking is false %}}{{{{- '<think>\\n\\n</think>\\n\\n' }}}}
{{%- endif %}}{{%- endif %}}"""

# Mistral 7B v0.3: system text and tools stand at the last question, so history is written anew each time.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{%- set system = messages[0].content %}{%- set turns = messages[1:] %}
{%- else %}{%- set turns = messages %}{%- endif %}
{%- set ns = namespace(last=0) %}
{%- for message in turns %}{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST] ' + (system + '\\n\\n' if system is defined and loop.index0 == ns.last else '') }}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id | length != 9 %}{{- raise_exception('Tool call IDs need 9 letters or digits') }}
{%- endif %}
{{- '[TOOL_RESULTS] {"content": ' + message.content | string + ', "call_id": "' + message.tool_call_id }}
{{- '"}[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{%- set call = message.tool_calls[0] %}
{{- '[TOOL_CALLS] [' + call.function | tojson + ', "id": "' + call.id + '"]' + eos_token }}
{%- else %}{{- ' ' + message.content | trim + eos_token }}{%- endif %}
{%- endfor %}"""

# Gemma 3: roles of its own, the system text before the first question; Gemma 2 refuses a system text.
GEMMA = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}{%- set prefix = messages[0].content + '\\n\\n' %}
{%- set turns = messages[1:] %}{%- else %}{%- set prefix = '' %}{%- set turns = messages %}{%- endif %}
{%- for message in turns %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{%- endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- (prefix if loop.first else '') + message.content | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<start_of_turn>model\\n' }}{%- endif %}"""

# Phi-3: a finished conversation ends with the end of text; its tokens swallow the line break behind them.
PHI_3 = """\
{%- for message in messages %}
{{- '<|' + message.role + '|>\\n' + message.content + '<|end|>\\n' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{%- else %}{{- eos_token }}{%- endif %}"""

# DeepSeek-R1 and its distills: no line breaks, the generation prompt opens a thought, history drops thoughts.
DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages %}
{%- if message.role == 'system' %}{{- message.content }}
{%- elif message.role == 'user' %}{{- '<｜User｜>' + message.content }}
{%- else %}
{{- '<｜Assistant｜>' + message.content.split('</think>')[-1].lstrip('\\n') + '<｜end▁of▁sentence｜>' }}
{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜><think>\\n' }}{%- endif %}"""
