// Driving an arm, hold to move: keys, pads and a gamepad, over a socket of its own, so that nothing delays an input.
// The actor decides who drives; whatever ends here, also a closed tab, it takes for hands off, and the arm holds.
import { dial } from "/stream.js";

const AWAY = "Hands off, because this page lost the focus: the arm holds";
const INPUT_MS = 50, LATE_S = 1, DEAD = 0.15, PULLED = 0.6;
const PADS = { // label: [entry, direction, key]
  "Forward": ["x", 1, "i"], "Back": ["x", -1, "k"], "Left": ["y", 1, "j"], "Right": ["y", -1, "l"],
  "Up": ["z", 1, "u"], "Down": ["z", -1, "o"], "Grip": ["gripper", 1, "g"], "Release": ["gripper", -1, "h"],
};
const ARROWS = { ArrowUp: "i", ArrowDown: "k", ArrowRight: "l", ArrowLeft: "j" };
const STICKS = [["y", 0], ["x", 1], ["yaw", 2], ["z", 3]]; // of a gamepad's standard mapping: entry, axis
const held = new Map(); // what is held now, and its label of PADS: a physical key by its code, a pad by its label
let wheel = null; // while this page drives: {socket, actor, card, timer, and what take() begins with}

export function steer(card, actor, role) {
  const part = card.querySelector(".drive") ?? build(card);
  part.hidden = role !== "operator" || actor.remote === null;
  const mine = wheel?.actor === actor.name;
  if (mine) wheel.card = card; // another one, after a while in which the learner did not answer
  part.querySelector(".begin").hidden = mine;
  part.querySelector(".wheel").hidden = !mine;
  const other = actor.remote && actor.remote !== part.dataset.me; // what is reported is up to a second old
  if (!mine) part.querySelector(".who").textContent = other ? `${actor.remote} drives` : part.dataset.why ?? "";
}

function build(card) {
  const [part, controls, row, pads] = ["drive", "wheel", "row", "pads"].map((kind) => make("div", { class: kind }));
  const begin = button("Take over", () => take(card), "begin");
  row.append(button("Hand back to the policy", () => press("hand back")));
  row.append(button("Let go: the arm holds", () => letGo("The arm holds")));
  for (const [label, [, , key]] of Object.entries(PADS)) {
    const pad = make("button", { class: "pad", "data-pad": label });
    pad.append(label, make("kbd", {}, key));
    pad.onpointerdown = (event) => { pad.setPointerCapture(event.pointerId); held.set(label, label); };
    pad.onpointerup = pad.onpointercancel = pad.onlostpointercapture = () => held.delete(label);
    pad.oncontextmenu = (event) => event.preventDefault();
    pad.onkeydown = ({ key, repeat }) => { if (!repeat && (key === " " || key === "Enter")) held.set(label, label); };
    pad.onkeyup = pad.onblur = () => held.delete(label);
    pads.append(pad);
  }
  controls.append(make("div", { class: "views" }), pads, row,
    make("p", { class: "soft" }, "Hold a key, a pad or a stick to move. RB of a gamepad hands back"));
  part.append(begin, make("p", { class: "who soft", role: "status" }), controls);
  card.append(part);
  return part;
}

function take(card) {
  letGo("The arm holds");
  const socket = dial(), actor = card.dataset.key;
  socket.binaryType = "arraybuffer";
  const begun = { number: 0, seen: 0, frame: 0, heard: performance.now(), press: "take over", asked: new Map(), next: 0 };
  wheel = { socket, actor, card, ...begun };
  socket.onopen = () => socket.send(JSON.stringify({ token: sessionStorage.getItem("token") ?? "" }));
  socket.onmessage = ({ data }) => {
    if (wheel?.socket !== socket) return;
    if (typeof data !== "string") show(new DataView(data).getUint32(0), data.slice(4));
    else if ("role" in JSON.parse(data)) wheel.timer = setInterval(send, INPUT_MS);
    else hear(JSON.parse(data));
  };
  socket.onclose = ({ reason }) => {
    if (wheel?.socket === socket) letGo(reason || "The page's process is gone: the arm holds");
  };
  say("Taking over");
}

function send() {
  const isSeen = wheel.card.isConnected; // else nobody sees the arm now
  if (!isSeen) held.clear();
  if (document.hidden || !document.hasFocus()) return letGo(AWAY);
  if (performance.now() > wheel.heard + 1000 * LATE_S) say("The arm does not answer: it holds");
  if (wheel.socket.bufferedAmount) return; // the link is behind: what waits there would be old
  const motion = {}, shares = isSeen ? sticks() : {};
  for (const label of new Set(held.values())) {
    const [entry, direction] = PADS[label];
    shares[entry] = (shares[entry] ?? 0) + direction;
  }
  for (const [entry, share] of Object.entries(shares)) if (share) motion[entry] = Math.max(-1, Math.min(1, share));
  const gripper = Math.sign(motion.gripper ?? 0);
  delete motion.gripper;
  const { actor, seen, press: pressed } = wheel; // a press is said until it is heard
  ask({ ask: "drive", actor, number: ++wheel.number, seen, press: pressed, motion, gripper });
}

function ask(what) {
  const id = ++wheel.next;
  wheel.socket.send(JSON.stringify({ id, ...what }));
  return id;
}

function hear({ id, answer, error }) {
  if (error) return letGo(error);
  if (wheel.asked.delete(id) || !answer) return; // there is no such preview
  const { driver, holder, text, number, heard, frame, cameras } = answer;
  if (heard && holder !== driver) return letGo(holder ? `${holder} drives` : text || "The arm is handed back");
  if (number > wheel.seen) {
    Object.assign(wheel, { seen: number, heard: performance.now() });
    wheel.card.querySelector(".drive").dataset.me = driver;
    if (wheel.press === "take over") wheel.press = "";
    say(text || `${wheel.card.dataset.word === "HUMAN" ? "You drive" : "You are at the controls"}, as ${driver}`);
  }
  if (frame > wheel.frame && !wheel.asked.size) {
    wheel.frame = frame;
    for (const camera of cameras) wheel.asked.set(ask({ ask: "preview", camera }), camera);
  }
}

function show(id, jpeg) {
  const camera = wheel.asked.get(id), views = wheel.card.querySelector(".wheel .views");
  if (!wheel.asked.delete(id)) return;
  let img = [...views.children].find((child) => child.dataset.camera === camera);
  if (!img) views.append(img = make("img", { alt: camera.split(".").at(-1), "data-camera": camera }));
  if (img.src) URL.revokeObjectURL(img.src);
  img.src = URL.createObjectURL(new Blob([jpeg], { type: "image/jpeg" }));
}

// What ends a takeover here. The page's process tells the actor once the socket closes.
function letGo(why) {
  if (!wheel) return;
  const { socket, card, timer } = wheel, part = card.querySelector(".drive");
  part.dataset.why = why;
  part.querySelector(".who").textContent = why;
  part.querySelector(".wheel").hidden = true;
  part.querySelector(".begin").hidden = false;
  clearInterval(timer);
  held.clear();
  wheel = null;
  socket.close();
}

function press(word) {
  if (wheel) wheel.press = word;
}

function say(text) {
  const who = wheel.card.querySelector(".drive .who");
  if (who.textContent !== text) who.textContent = text;
}

function sticks() {
  const found = {};
  for (const pad of navigator.getGamepads?.() ?? []) {
    if (pad?.mapping !== "standard") continue;
    for (const [entry, axis] of STICKS) if (Math.abs(pad.axes[axis]) > DEAD) found[entry] = -pad.axes[axis];
    const [open, close] = [pad.buttons[6].value > PULLED, pad.buttons[7].value > PULLED];
    if (open !== close) found.gripper = close ? 1 : -1;
    if (pad.buttons[5].pressed) press("hand back");
  }
  return found;
}

function make(name, attributes = {}, text = "") {
  const made = document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}

function button(text, pressed, kind = "") {
  const made = make("button", kind ? { class: kind } : {}, text);
  made.onclick = pressed;
  return made;
}

// -- keys, while this page drives. A key that comes up may bear another name than it did when it went down, because the
// layout or a modifier changed meanwhile; macOS tells nothing of a key that comes up while Cmd is held.
addEventListener("keydown", (event) => {
  if (!wheel) return;
  if (event.ctrlKey || event.metaKey || event.altKey) return held.clear();
  if (event.key === "Escape") return letGo("The arm holds");
  const key = ARROWS[event.key] ?? event.key.toLowerCase();
  const label = Object.keys(PADS).find((name) => PADS[name][2] === key);
  if (!label) return;
  if (!event.repeat) held.set(event.code, label); // a repeat begins nothing: after hands off a key is pressed anew
  event.preventDefault();
});
addEventListener("keyup", (event) => held.delete(event.code));
for (const event of ["contextmenu", "dragstart"]) addEventListener(event, () => held.clear()); // they swallow the key that comes up
addEventListener("blur", () => letGo(AWAY));
addEventListener("pagehide", () => letGo(AWAY));
document.addEventListener("visibilitychange", () => document.hidden && letGo(AWAY));
