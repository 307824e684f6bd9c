"use strict";
const at = id => document.getElementById(id);
const path = () => "/v2/models/" + encodeURIComponent(at("model").value);
const KINDS = { BYTES: "text", BOOL: "true or false" };
const HIDDEN = name => name === "lengths" || name.endsWith("_lengths");
const hints = {
  items: "what the user has had, or what is in the basket; of histories the oldest first",
  users: "the name of a user, whom the service knows",
  exclude: "what is not recommended, too",
  candidates: "the only names that are ranked",
};
const hint = (name, datatype) => hints[name]
  || (name.startsWith("events/") ? "of each of the items, in their order; " : "")
  + (name.startsWith("context/") ? "known of the event to come; " : "")
  + (name.startsWith("users/") ? "of the user; " : "")
  + (KINDS[datatype] || "numbers");
const TITLES = new Map(Object.entries(JSON.parse(at("titles").textContent)));
let inputs = [];

function made(tag, text, attributes = {}) {
  const element = document.createElement(tag);
  element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}

async function health() {
  let text = "the service does not answer", ready = false;
  try {
    const answer = await fetch("/v2/health/ready");
    ready = answer.ok;
    text = ready ? "ready" : "not ready: a model is being loaded, or the service ends";
  } catch (error) { /* said above */ }
  at("health").textContent = "Health: " + text;
  at("health").className = ready ? "ready" : "wrong";
}

async function about() {
  at("inputs").replaceChildren();
  inputs = [];
  const answer = await fetch(path()), facts = await answer.json();
  if (!answer.ok) { at("about").textContent = facts.error; return show(); }
  at("about").textContent = "Versions: " + facts.versions.join(", ") + ". The first one serves.";
  inputs = facts.inputs.filter(input => !HIDDEN(input.name));
  for (const { name, datatype } of inputs) {
    const label = made("label", name + " ", { for: "input " + name });
    label.append(made("small", hint(name, datatype) + "; one on each line"));
    const rows = name === "items" ? 4 : 1;
    at("inputs").append(label, made("textarea", "", { id: "input " + name, rows, spellcheck: "false" }));
  }
  const label = made("label", "k ", { for: "k" });
  label.append(made("small", "how many; empty for as many as the model was exported with"));
  at("inputs").append(label, made("input", "", { id: "k", type: "number", min: 1 }));
  show();
}

function element(text, datatype) {
  if (datatype === "BYTES") return text;
  if (datatype === "BOOL") return text.trim() === "true";
  const number = Number(text);
  return text.trim() === "" || Number.isNaN(number) ? text : number;
}

function request() {
  const tensors = [];
  const names = inputs.map(input => input.name);
  for (const { name, datatype } of inputs) {
    const lines = at("input " + name).value.split("\n").map(line => line.replace(/\r$/, ""));
    const data = lines.filter(line => line !== "").map(line => element(line, datatype));
    const users = names.includes("users") && at("input users").value.trim() !== "";
    const isOnlyPart = name === "items" && !users;
    if (data.length || isOnlyPart) tensors.push({ name, datatype, shape: [data.length], data });
  }
  const asked = { inputs: tensors };
  const k = at("k");
  if (k && k.value !== "") asked.parameters = { k: Number(k.value) };
  return asked;
}

function show() {
  const quoted = JSON.stringify(request()).replaceAll("'", "'\\''");
  at("curl").textContent = "curl " + location.origin + path() + "/infer -d '" + quoted + "'";
}

function answered(outputs, version) {
  const found = Object.fromEntries(outputs.map(output => [output.name, output.data]));
  if (found.items && TITLES.size) found.title = found.items.map(name => TITLES.get(name) || "");
  const columns = Object.keys(found).filter(name => found[name].length && !/^(lengths|unknown)/.test(name));
  const count = columns.length ? Math.max(...columns.map(name => found[name].length)) : 0;
  const isText = name => typeof found[name][0] === "string";
  const cell = (tag, name, text) => made(tag, text, isText(name) ? {} : { class: "number" });
  const head = made("tr", "");
  head.append(made("th", ""), ...columns.map(name => cell("th", name, name)));
  const rows = [];
  for (let n = 0; n < count; n++) {
    const row = made("tr", "");
    row.append(made("td", n + 1), ...columns.map(name => cell("td", name, found[name][n])));
    rows.push(row);
  }
  at("answer").querySelector("thead").replaceChildren(head);
  at("answer").querySelector("tbody").replaceChildren(...rows);
  at("answer").hidden = false;
  const sum = name => (found[name] || []).reduce((a, b) => a + b, 0);
  const notes = ["Answered by version " + version + "."];
  if (sum("unknown")) notes.push(sum("unknown") + " of the names are unknown to the model.");
  if (sum("unknown_users")) notes.push("This user is unknown: the answer is that for a new user.");
  at("message").textContent = notes.join(" ");
  at("message").className = "";
}

async function ask(event) {
  event.preventDefault();
  at("answer").hidden = true;
  try {
    const body = JSON.stringify(request());
    const answer = await fetch(path() + "/infer", { method: "POST", body });
    const facts = await answer.json();
    if (answer.ok) return answered(facts.outputs, facts.model_version);
    at("message").textContent = "Status " + answer.status + ": " + facts.error;
  } catch (error) {
    at("message").textContent = String(error);
  }
  at("message").className = "wrong";
}

at("ask").addEventListener("submit", ask);
at("ask").addEventListener("input", show);
at("model").addEventListener("change", about);
health();
about();
setInterval(health, 5000);
