"""--enable-offline-docs: /docs as one page of our own, for machines that cannot fetch the usual one's scripts."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>API</title><style>
body { font: 15px/1.5 sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; }
details { border: 1px solid #ccc; border-radius: 4px; margin: .4em 0; padding: .3em .8em; }
summary { cursor: pointer; font-family: monospace; } summary b { display: inline-block; width: 4.5em; }
pre, textarea { background: #f6f6f6; width: 100%; box-sizing: border-box; padding: .6em; overflow: auto; }
textarea { height: 9em; font-family: monospace; }
</style></head><body><h1 id="title">API</h1><p><a href="openapi.json">openapi.json</a></p><div id="routes"></div>
<script>
"use strict";
const element = (tag, text) => Object.assign(document.createElement(tag), {textContent: text || ""});
const resolve = (api, node) => node && node.$ref ? node.$ref.slice(2).split("/").reduce((o, k) => o[k], api) : node;
function route(path, method, what, api) {
  const box = element("details"), head = element("summary");
  head.append(element("b", method.toUpperCase()), path, element("i", what.summary ? " " + what.summary : ""));
  box.append(head);
  const content = ((what.requestBody || {}).content || {})["application/json"];
  let body = null;
  if (content) {
    box.append(element("pre", JSON.stringify(resolve(api, content.schema), null, 1)));
    body = Object.assign(element("textarea"), {value: "{}"});
    box.append(body);
  }
  const send = element("button", "Send"), answer = element("pre");
  send.onclick = async () => {
    const key = localStorage.getItem("key");
    const headers = Object.assign({"content-type": "application/json"}, key ? {authorization: "Bearer " + key} : {});
    const reply = await fetch("." + path, {method, headers, body: body ? body.value : undefined});
    answer.textContent = reply.status + "\\n" + await reply.text();
  };
  box.append(send, answer);
  return box;
}
fetch("openapi.json").then(reply => reply.json()).then(api => {
  document.getElementById("title").textContent = api.info.title + " " + api.info.version;
  for (const [path, methods] of Object.entries(api.paths))
    for (const [method, what] of Object.entries(methods))
      document.getElementById("routes").append(route(path, method, what, api));
});
</script></body></html>
"""
"""Lists the routes of openapi.json with the schema of their bodies, and sends requests to them."""
