// Stands in for a websocket, and is used as one: what is said is POSTed, what is told comes as server-sent events.
export class Stream {
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
    this.#said = this.#said.then(async () => {
      const { ok } = await fetch("/say", { method: "POST", headers }).catch(() => ({}));
      if (!ok) this.#end(1006, "");
    });
  }

  #end(code, reason) {
    if (this.#over) return;
    this.#over = true;
    this.#source.close();
    this.onclose({ code, reason });
  }
}
