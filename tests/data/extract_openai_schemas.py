"""Extract the parts of OpenAI's specification that the HTTP tests use. Writes openai_schemas.json.

    python tests/data/extract_openai_schemas.py openapi.json

The specification (https://github.com/openai/openai-openapi, MIT licence) has 1.5 MB. The extract, without descriptions,
is about 4 % of it. ``nullable`` of OpenAPI 3.0 is rewritten as JSON Schema.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOTS = [
    "CreateChatCompletionResponse",
    "CreateChatCompletionStreamResponse",
    "CreateCompletionResponse",
    "CreateEmbeddingResponse",
    "Response",
    "ResponseItemList",
    "CompactResource",
    "ResponseStreamEvent",
    "ConversationResource",
    "DeletedConversationResource",
    "ConversationItemList",
    "ErrorResponse",
    "ListModelsResponse",
    "Model",
]
REQUESTS = ["CreateChatCompletionRequest", "CreateCompletionRequest", "CreateEmbeddingRequest", "CreateResponse"]
# The members of these unions that a text-only server sends. Any other member is a violation.
SENT = {
    "OutputItem": {
        "OutputMessage", "FunctionToolCall", "CustomToolCall", "ReasoningItem", "MCPListTools", "MCPToolCall",
        "MCPApprovalRequest",
    },
    "ItemResource": {
        "InputMessageResource", "OutputMessage", "FunctionToolCallResource", "FunctionToolCallOutputResource",
        "CustomToolCallResource", "CustomToolCallOutputResource", "ReasoningItem", "CompactionBody",
        "MCPListTools", "MCPToolCall", "MCPApprovalRequest", "MCPApprovalResponseResource",
    },
    "ConversationItem": {
        "Message", "FunctionToolCallResource", "FunctionToolCallOutputResource", "ReasoningItem", "CompactionBody",
        "CustomToolCall", "CustomToolCallOutput", "MCPListTools", "MCPToolCall", "MCPApprovalRequest",
        "MCPApprovalResponseResource",
    },
    "ItemField": {"CompactionBody"},
    "InputItem": {"EasyInputMessage"},
    "Tool": {"FunctionTool", "CustomToolParam", "NamespaceToolParam", "MCPTool"},
    "ToolChoiceParam": {
        "ToolChoiceOptions", "ToolChoiceFunction", "ToolChoiceCustom", "ToolChoiceAllowed", "ToolChoiceMCP",
    },
    "InputContent": {"InputTextContent"},
    "ResponseStreamEvent": {
        "ResponseCreatedEvent", "ResponseQueuedEvent", "ResponseInProgressEvent", "ResponseCompletedEvent",
        "ResponseIncompleteEvent", "ResponseFailedEvent", "ResponseErrorEvent", "ResponseOutputItemAddedEvent",
        "ResponseOutputItemDoneEvent", "ResponseContentPartAddedEvent", "ResponseContentPartDoneEvent",
        "ResponseTextDeltaEvent", "ResponseTextDoneEvent", "ResponseReasoningTextDeltaEvent",
        "ResponseReasoningTextDoneEvent",
        "ResponseFunctionCallArgumentsDeltaEvent", "ResponseFunctionCallArgumentsDoneEvent",
        "ResponseCustomToolCallInputDeltaEvent", "ResponseCustomToolCallInputDoneEvent",
        "ResponseMCPListToolsInProgressEvent", "ResponseMCPListToolsCompletedEvent",
        "ResponseMCPCallInProgressEvent", "ResponseMCPCallArgumentsDeltaEvent", "ResponseMCPCallArgumentsDoneEvent",
        "ResponseMCPCallCompletedEvent", "ResponseMCPCallFailedEvent",
    },
}  # fmt: skip
PROSE = {"description", "example", "examples", "title", "deprecated", "discriminator"}


def clean(node: Any, *, names: bool = False) -> Any:
    """``node`` without descriptions and vendor keys. ``names``: the keys are property names, not keywords."""
    if isinstance(node, list):
        return [clean(item) for item in node]
    if not isinstance(node, dict):
        return node
    kept = {
        key: clean(value, names=key == "properties" and not names)
        for key, value in node.items()
        if names or not (key in PROSE or key.startswith("x-") or key == "nullable")
    }
    return {"anyOf": [kept, {"type": "null"}]} if node.get("nullable") is True and not names else kept


def narrow(name: str, schema: Any) -> Any:
    """``schema``, reduced to the members in SENT if it is one of these unions."""
    if name not in SENT:
        return schema
    kind = "oneOf" if "oneOf" in schema else "anyOf"
    kept = [member for member in schema[kind] if member.get("$ref", "").rsplit("/", 1)[-1] in SENT[name]]
    assert len(kept) == len(SENT[name]), f"{name} has changed"
    return {kind: kept}


def references(node: Any) -> set[str]:
    """Names of the component schemas that ``node`` refers to."""
    if isinstance(node, list):
        return set().union(*map(references, node))
    if not isinstance(node, dict):
        return set()
    own = {node["$ref"].rsplit("/", 1)[1]} if isinstance(node.get("$ref"), str) else set()
    return own.union(*map(references, node.values()))


def fields(schemas: dict[str, Any], name: str) -> set[str]:
    """Property names of a request schema, including its allOf."""
    found: set[str] = set()
    for part in schemas[name].get("allOf", [schemas[name]]):
        found |= fields(schemas, part["$ref"].rsplit("/", 1)[1]) if "$ref" in part else set(part.get("properties", {}))
    return found


def main() -> None:
    """Read the specification named on the command line."""
    spec = json.loads(Path(sys.argv[1]).read_text())
    schemas = spec["components"]["schemas"]
    wanted, kept = list(ROOTS), {}
    while wanted:
        name = wanted.pop()
        if name not in kept:
            kept[name] = narrow(name, clean(schemas[name]))
            wanted += references(kept[name])
    out = {
        "source": f"OpenAI API {spec['info']['version']}, https://github.com/openai/openai-openapi, MIT licence",
        "request_fields": {name: sorted(fields(schemas, name)) for name in REQUESTS},
        "components": {"schemas": dict(sorted(kept.items()))},
    }
    target = Path(__file__).with_name("openai_schemas.json")
    target.write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()
