// The connection to the page's process: a websocket, or what stands in for one, where a browser refuses that of a host
// whose certificate it was told to trust. Both are used alike.
let streams = false; // whether the next one stands in

export function dial() {
  if (streams) return new Stream();
  const scheme = location.protocol === "https:" ? "wss" : "ws";
  const socket = new WebSocket(`${scheme}://${location.host}/socket`);
  socket.addEventListener("open", () => (streams = false));
  streams = true; // unless this one opens
  return socket;
}

// What is said is POSTed, what is told comes as server-sent events.
class Stream {
  bufferedAmount = 0; // messages that are said, and have not come
  #source = new EventSource("/stream");
  #name = "";
  #over = false;
  #said = Promise.resolve(); // one message after the other: the token is the first

  constructor() {
    this.#source.onmessage = ({ data }) => {
      const { stream, text, bytes, code, reason } = JSON.parse(data);
      if (stream) {
        this.#name = stream;
        this.onopen();
      } else if (code) this.#end(code, reason);
      else this.onmessage({ data: text ?? Uint8Array.from(atob(bytes), (letter) => letter.charCodeAt(0)).buffer });
    };
    this.#source.onerror = () => this.#end(1006, "");
  }

  send(text) {
    const headers = { "X-Stream": this.#name, "X-Say": encodeURIComponent(text) };
    this.bufferedAmount += 1;
    this.#said = this.#said.then(async () => {
      const { ok } = await fetch("/say", { method: "POST", headers }).catch(() => ({}));
      this.bufferedAmount -= 1;
      if (!ok) this.#end(1006, "");
    });
  }

  close() {
    this.#end(1000, "");
  }

  #end(code, reason) {
    if (this.#over) return;
    this.#over = true;
    this.#source.close();
    if (!this.#name) streams = false; // it did not open: a websocket may
    this.onclose({ code, reason });
  }
}
