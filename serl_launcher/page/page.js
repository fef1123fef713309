// The operator's page. It asks, and shows what it is answered. What comes from elsewhere becomes text, never markup.
import { steer } from "/drive.js";
import * as scene from "/scene.js";
import { dial } from "/stream.js";

const at = (id) => document.getElementById(id);
const LOST_S = 25, FRAME_MS = 100, SURE_MS = 700, MANY = 4, FILTERS = ["which", "source", "actor"];
const ORDERS = { pause: "Pause", resume: "Resume", next: "Next", stop: "Stop" };
const WORDS = { ready: "Ready", pause: "Pause robot", resume: "Resume robot" };
const VERDICTS = { success: "Success", failure: "Failure", discard: "Discard" };
const MEANS = {
  pause: "Robots hold and nothing trains, until Resume", resume: "The run goes on",
  next: "This phase ends, the next one begins", stop: "The run ends, with its result",
  mp4: "A video of its cameras", shard: "A LeRobot dataset of this episode alone, as a zip archive",
};

// -- the token: in the fragment of the link, which no server is sent; kept for this tab alone
if (location.hash.length > 1) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname);
}
let socket = null, heard = 0, role = "", number = 0, state = null, chosen = "", most = 12;
const asked = new Map();

function opened() {
  const made = dial();
  made.binaryType = "arraybuffer";
  made.onopen = () => made.send(JSON.stringify({ token: sessionStorage.getItem("token") ?? "" }));
  return made;
}

function connect() {
  socket = opened();
  setTimeout(endMute, LOST_S * 1000, socket, performance.now());
  socket.onmessage = ({ data }) => {
    heard = performance.now();
    if (!role) {
      role = JSON.parse(data).role;
      at("orders").hidden = role !== "operator";
    } else if (typeof data === "string") {
      const { id, answer, error } = JSON.parse(data);
      settle(id, answer, error);
    } else settle(new DataView(data).getUint32(0), new Blob([data.slice(4)], { type: "image/jpeg" }));
  };
  socket.onclose = ({ code, reason }) => {
    role = "";
    for (const id of [...asked.keys()]) settle(id, null, "the page's process did not answer: it may be lost");
    banner({ word: "IDLE", who: "", text: reason || "The page's process does not answer: it is asked again" });
    if (code !== 1008) setTimeout(connect, 1000);
  };
}

// A browser may not know for minutes that a link is dead, as after its machine slept.
function endMute(link, since) {
  if (heard < since) link.close();
}

function ask(what) {
  return new Promise((resolve, reject) => {
    if (!role) return reject(new Error("not connected: nothing was sent"));
    const id = ++number;
    const late = setTimeout((...about) => {
      settle(id, null, `no answer for ${LOST_S} s: it may be lost`);
      endMute(...about);
    }, LOST_S * 1000, socket, performance.now());
    asked.set(id, { resolve, reject, late });
    socket.send(JSON.stringify({ id, ...what }));
  });
}

function settle(id, answer, error) {
  const { resolve, reject, late } = asked.get(id) ?? {};
  if (!asked.delete(id)) return;
  clearTimeout(late);
  if (error) reject(new Error(error));
  else resolve(answer);
}

async function order(button, word, about, actor = "") {
  button.disabled = true;
  const line = say(`${word} ${actor || about}: sent`);
  try {
    line.textContent = await ask({ ask: "order", order: word, about, actor });
  } catch (error) {
    line.textContent = `${word}: ${error.message}`;
    line.className = "bad";
  }
  button.disabled = false;
  setTimeout(() => line.remove(), line.className ? 15000 : 5000);
  show();
  list();
}

function say(text) {
  const line = element("p", text);
  at("said").append(line);
  return line;
}

// -- elements, which stay as long as their key does, so that a press is never lost
function element(name, text = "", attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function keyed(parent, items, key, make, update = () => {}) {
  const there = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const kept = items.map((item) => {
    const name = String(key(item)), child = there.get(name) ?? make(item);
    child.dataset.key = name;
    update(child, item);
    return child;
  });
  const stays = new Set(kept);
  for (const child of [...parent.children]) if (!stays.has(child)) child.remove();
  kept.forEach((child, i) => {  // whoever has the focus keeps it, because what is in its place is not moved
    if (child !== parent.children[i]) parent.insertBefore(child, parent.children[i] ?? null);
  });
}

function write(parent, selector, text) {
  const found = parent.querySelector(selector);
  if (found.textContent !== String(text)) found.textContent = text;
}

function buttons(words, about, actor = () => "") {
  const made = element("div", "", { class: "verdicts" });
  for (const [word, text] of Object.entries(words)) {
    const button = element("button", text, { "data-word": word });
    button.onclick = () => order(button, word, about(), actor());
    made.append(button);
  }
  return made;
}

// -- what is shown
function banner({ word, text, who }) {
  at("banner").dataset.word = word;
  at("word").textContent = word;
  at("sentence").textContent = who ? `${who}: ${text}` : text;
  document.title = `${word} · ${state?.run ?? "Retake"}`;
}

async function show() {
  if (!role || document.hidden) return;
  try {
    state = await ask({ ask: "state" });
  } catch (error) {
    return role && banner({ word: "IDLE", who: "", text: error.message }); // else the banner says why it is over
  }
  banner(state.banner);
  at("run").textContent = state.run;
  for (const button of at("orders").children)
    button.hidden = !state.alive || button.dataset.word === (state.held ? "pause" : "resume");
  const { who, text: urgent } = state.banner;
  const others = [...new Set(state.warnings)].filter((text) => text !== `${who}: ${urgent}`);
  keyed(at("warnings"), others, (text) => text, (text) => element("li", text));
  keyed(at("plan"), state.plan, (step) => step.name, step, (li, step) => {
    li.dataset.when = step.when;
    write(li, ".soft", step.when === "now" ? `${step.text}. Left: ${step.left || "not known"}` : step.text);
    const bar = li.querySelector("progress");
    bar.hidden = step.share === null;
    bar.value = step.share ?? 0;
  });
  const few = state.actors.length <= MANY;
  chosen = state.actors.some((actor) => actor.name === chosen) ? chosen : state.actors[0]?.name;
  keyed(at("actors"), few ? state.actors : state.actors.filter((a) => a.name === chosen), (a) => a.name, card, dress);
  options("source", state.sources);
  options("actor", state.actors.map((actor) => actor.name));
  at("many").hidden = few;
  keyed(at("many").querySelector("tbody"), few ? [] : state.actors, (actor) => actor.name, row, (tr, actor) => {
    const told = [actor.name, actor.word, `${actor.rate} Hz`, actor.late, actor.steps.toLocaleString(), actor.episode];
    tr.setAttribute("aria-current", String(actor.name === chosen));
    told.forEach((text, i) => ((tr.cells[i].firstChild ?? tr.cells[i]).textContent = text));
  });
  keyed(at("numbers"), state.numbers, (each) => each.name, (each) => {
    const made = element("div", "", { title: each.text });
    made.append(element("dt", each.name), element("dd"), element("dd", each.text, { class: "why" }));
    return made;
  }, (made, each) => write(made, "dd", each.value));
}

function options(id, names) {  // those that came once stay: their episodes do, too
  const there = [...at(id).options].map(({ value }) => value);
  for (const name of names) if (!there.includes(name)) at(id).append(element("option", name, { value: name }));
}

function step({ name, when }) {
  const li = element("li");
  li.append(element("strong", name), element("p", "", { class: "soft" }), element("progress", "", { max: 1 }));
  return li;
}

function row(actor) {
  const tr = element("tr");
  for (let i = 0; i < 6; i++) tr.append(element("td"));
  tr.cells[0].append(element("button", actor.name));
  tr.onclick = () => { chosen = actor.name; show(); };
  return tr;
}

function card(actor) {
  const made = element("article", "", { class: "card" });
  made.append(element("h2", actor.name), element("p", "", { class: "word" }), element("p", "", { class: "soft text" }),
    element("div", "", { class: "views" }), element("div", "", { class: "scene" }),
    element("ul", "", { class: "state" }), element("p", "", { class: "soft numbers" }));
  // A verdict on what the robot does now is said to its actor, which ends the episode; any other one is stored.
  const { dataset } = made;
  made.append(buttons(WORDS, () => dataset.question, () => actor.name),
    buttons(VERDICTS, () => dataset.runs || dataset.episode, () => (dataset.runs ? actor.name : "")));
  return made;
}

function dress(made, actor) {
  const { episode, question, runs } = actor, [words, judged] = made.querySelectorAll(".verdicts");
  Object.assign(made.dataset, { episode, question, runs });
  made.dataset.word = actor.word;
  write(made, ".word", actor.word);
  write(made, ".text", actor.text);
  write(made, ".numbers", `${actor.rate} steps/s, ${actor.late} late, ${actor.steps.toLocaleString()} steps, ` +
    `${actor.takeovers} takeovers, ${actor.outbox} MB not delivered. Episode ${actor.episode || "none yet"}${actor.closed ? ", ended" : ", goes on"}`);
  words.hidden = role !== "operator";
  judged.hidden = role !== "operator" || !(runs || (episode && actor.closed));
  const [ready, pause, resume] = words.children;
  ready.hidden = !actor.asks;
  pause.hidden = actor.driver === "PAUSED";
  resume.hidden = !pause.hidden;
  steer(made, actor, role);
  keyed(made.querySelector(".views"), actor.cameras, (name) => name, (name) => {
    const figure = element("figure");
    figure.append(element("img", "", { alt: name.split(".").at(-1) }), element("figcaption", name.split(".").at(-1)));
    film(figure.firstChild, made, name);
    return figure;
  });
  keyed(made.querySelector(".scene"), scene.views(actor.name, actor.state), ([title]) => title, scene.view, scene.show);
  keyed(made.querySelector(".state"), actor.state, (each) => each.name, (each) => {
    const li = element("li");
    li.append(element("span", each.name), element("span", "", { class: "now" }));
    return li;
  }, (li, each) => write(li, ".now", `${each.value} ${each.unit}`));
}

// An image is asked for once the one before it is drawn, and only while somebody can see it.
async function film(img, made, camera) {
  for (;;) {
    await new Promise((next) => setTimeout(next, FRAME_MS));
    if (!img.isConnected) { if (img.src) return URL.revokeObjectURL(img.src); continue; }
    const { top, bottom } = img.getBoundingClientRect();
    if (document.hidden || !role || bottom < 0 || top > innerHeight) continue;
    await picture(img, made.dataset.episode, camera);
  }
}

async function picture(img, episode, camera) {
  try {
    const blob = await ask({ ask: "image", episode, camera });
    if (blob) {
      if (img.src) URL.revokeObjectURL(img.src);
      img.src = URL.createObjectURL(blob);
    } // else it has left the store
    return true;
  } catch { return false; } // the banner says that nobody answers
}

async function draw() {
  if (!role || document.hidden) return;
  keyed(at("curves"), await ask({ ask: "curves" }), (curve) => curve.name, (curve) => {
    const made = element("figure", "", { class: "card", title: curve.text });
    const caption = element("p");
    caption.append(element("strong", curve.name), " ", element("span", "", { class: "now" }));
    const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    svg.setAttribute("viewBox", "0 0 100 100");
    svg.setAttribute("preserveAspectRatio", "none");
    made.append(caption, svg, element("p", "", { class: "soft" }), element("p", curve.text, { class: "why" }));
    return made;
  }, plot);
}

function plot(made, { points, unit, over }) {
  const ys = points.flatMap((point) => point.slice(1)), last = points.at(-1);
  const isShare = unit === "%", top = Math.max(...ys), begin = points[0][0];
  const low = isShare ? 0 : Math.min(0, ...ys), high = isShare ? 100 : top > low ? top : low + 1;
  const x = (value) => (100 * (value - begin)) / Math.max(last[0] - begin, 1e-9);
  const y = (value) => 100 - (100 * (Math.min(Math.max(value, low), high) - low)) / (high - low);
  const line = (index) => points.map((point) => `${x(point[0])} ${y(point[index])}`);
  const svg = made.querySelector("svg"), parts = [];
  const add = (name, kind, d) => {
    const part = document.createElementNS("http://www.w3.org/2000/svg", name);
    part.setAttribute("class", kind);
    part.setAttribute("d", d);
    parts.push(part);
  };
  add("path", "base", `M0 ${y(0)} H100`);
  if (last.length === 4) add("path", "band", `M${line(2).join("L")}L${line(3).reverse().join("L")}Z`);
  add("path", "line", `M${line(1).join("L")}`);
  svg.replaceChildren(...parts);
  write(made, ".now", `${short(last[1])} ${unit}`);
  write(made, ".soft", `${short(low)} to ${short(high)}${unit && " " + unit}, over ${Math.round(last[0]).toLocaleString()} ${over}`);
}

const short = (value) => value.toLocaleString("en", { maximumSignificantDigits: 3 });

async function list() {
  if (!role || document.hidden) return;
  const only = Object.fromEntries(FILTERS.map((id) => [id, at(id).value]));
  const all = await ask({ ask: "episodes", ...only }), found = all.slice(0, most);
  at("more").hidden = all.length <= most;
  keyed(at("episodes"), found, (each) => each.id, (each) => {
    const li = element("li", "", { class: "card" });
    if (each.cameras.length) li.append(element("img", "", { class: "thumb", alt: `the end of ${each.id}` }));
    const files = Object.entries(state?.downloads ?? {}).filter(([format]) => format !== "mp4" || each.cameras.length);
    li.append(element("strong", each.id), element("p", "", { class: "soft" }), buttons(VERDICTS, () => each.id),
      ...files.map(([format, end]) => download(each.id, format, end)));
    return li;
  }, (li, each) => {
    const said = each.aside ? `set aside: ${each.aside}` : each.verdict || (each.closed ? "not judged" : "goes on");
    write(li, ".soft", `${said}${each.by && !each.aside ? ` (${each.by})` : ""}. ${each.actor}, ${each.phase}, ${each.steps} steps, ` +
      `return ${each.return}${each.assisted ? ", with help" : ""}`);
    const img = li.querySelector(".thumb"), steps = String(each.steps);
    if (img && img.dataset.steps !== steps)
      picture(img, each.id, each.cameras[0]).then((isAnswered) => { if (isAnswered) img.dataset.steps = steps; });
    li.querySelector(".verdicts").hidden = role !== "operator" || !state?.alive || each.goes_on;
    for (const button of li.querySelectorAll(".quiet")) button.hidden = role !== "operator" || !each.closed;
    for (const button of li.querySelectorAll("button"))
      button.setAttribute("aria-pressed", String(button.dataset.word === each.verdict));
  });
}

// A file is made on a connection of its own, so that the page goes on meanwhile.
function download(episode, format, end) {
  const button = element("button", format, { class: "quiet", title: MEANS[format] });
  button.onclick = () => {
    const line = say(`${format} of ${episode}: it is being made`), link = opened();
    const over = (text, bad = "") => {
      Object.assign(line, { textContent: text, className: bad });
      setTimeout(() => line.remove(), bad ? 15000 : 5000);
      button.disabled = false;
      link.onclose = null;
      link.close();
    };
    button.disabled = true;
    link.onclose = ({ reason }) => over(`${format}: ${reason || "the page's process did not answer"}`, "bad");
    link.onmessage = () => {
      link.onmessage = ({ data }) => {
        if (typeof data === "string") return over(`${format}: ${JSON.parse(data).error}`, "bad");
        const file = element("a", "", { href: URL.createObjectURL(new Blob([data.slice(4)])), download: episode + end });
        file.click();
        setTimeout(() => URL.revokeObjectURL(file.href), 60000);
        over(`${episode}${end}: saved`);
      };
      link.send(JSON.stringify({ id: 1, ask: "download", episode, format }));
    };
  };
  return button;
}

// -- orders to the run. Each names the phase that it means. Stop asks once more
for (const [word, text] of Object.entries(ORDERS)) {
  const button = element("button", text, { title: MEANS[word], "data-word": word });
  button.onclick = () => {
    if (word === "stop" && button.className !== "sure") {
      button.className = "sure";
      button.textContent = "End the run?";
      button.setAttribute("aria-disabled", "true"); // a double click is no answer
      setTimeout(() => button.removeAttribute("aria-disabled"), SURE_MS);
      setTimeout(() => { button.className = ""; button.textContent = text; }, 4000);
    } else if (state && !button.hasAttribute("aria-disabled")) order(button, word, state.phase);
  };
  at("orders").append(button);
}
addEventListener("keydown", (event) => { // a key that is held presses a button once
  if (event.repeat && event.key === "Enter") event.preventDefault();
});
at("explain").onclick = () =>
  at("explain").setAttribute("aria-pressed", String(document.body.classList.toggle("explained")));
for (const id of FILTERS) at(id).onchange = list;
at("more").onclick = () => { most += 24; list(); };

async function again(what, pause) {
  try { await what(); } catch (error) { console.warn(error.message); }
  setTimeout(() => again(what, pause), pause);
}
connect();
again(show, 500);
again(draw, 5000);
again(list, 4000);
